// A subset of Markdown: code, lists, headings, quotes and emphasis. Text becomes only text nodes, never HTML.

function element(name, className, ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function button(label, onClick, className = 'quiet') {
  const node = element('button', className, label);
  node.type = 'button';
  node.addEventListener('click', onClick);
  return node;
}

async function copy(text, copyButton) {
  try {
    await navigator.clipboard.writeText(text);
    copyButton.textContent = 'Copied';
  } catch {
    copyButton.textContent = 'Copy failed';
  }
  setTimeout(() => { copyButton.textContent = 'Copy'; }, 1500);
}

function codeBlock(language, text) {
  const bar = element('div', 'bar', element('span', '', language || 'code'));
  const copyButton = button('Copy', () => copy(text, copyButton));
  bar.append(copyButton);
  const block = element('pre', '', element('code', '', text));
  block.tabIndex = 0;
  return element('div', 'code', bar, block);
}

function inline(text) {
  const nodes = [];
  const pattern = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(\S(?:[^\n]*?\S)?)\*\*|\*(\S(?:[^*\n]*?\S)?)\*/g;
  let position = 0;
  for (const match of text.matchAll(pattern)) {
    nodes.push(text.slice(position, match.index));
    if (match[1]) nodes.push(element('code', '', match[2]));
    else if (match[3]) nodes.push(element('strong', '', match[3]));
    else nodes.push(element('em', '', match[4]));
    position = match.index + match[0].length;
  }
  nodes.push(text.slice(position));
  return nodes;
}

const ITEM = /^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;

function markdown(text) {
  const nodes = [];
  const lines = text.split('\n');
  let paragraph = [];
  const closeParagraph = () => {
    if (paragraph.length) nodes.push(element('p', '', ...inline(paragraph.join('\n'))));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const fence = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/.exec(line);
    const heading = /^#{1,6}\s+(.*)$/.exec(line);
    const item = ITEM.exec(line);
    if (fence) {
      closeParagraph();
      const codeLines = [];
      while (++i < lines.length && !lines[i].trim().startsWith(fence[1])) codeLines.push(lines[i]);
      nodes.push(codeBlock(fence[2], codeLines.join('\n')));
    } else if (heading) {
      closeParagraph();
      nodes.push(element('h3', '', ...inline(heading[1])));
    } else if (item) {
      closeParagraph();
      const list = element(item[1] ? 'ul' : 'ol', '');
      if (item[2]) list.start = Number(item[2]);
      for (let next = item; next && Boolean(next[1]) === Boolean(item[1]); next = ITEM.exec(lines[++i] ?? '')) {
        list.append(element('li', '', ...inline(next[3])));
      }
      i--;
      nodes.push(list);
    } else if (line.startsWith('>')) {
      closeParagraph();
      const quoted = [];
      for (; (lines[i] ?? '').startsWith('>'); i++) quoted.push(lines[i].replace(/^>\s?/, ''));
      i--;
      nodes.push(element('blockquote', '', ...inline(quoted.join('\n'))));
    } else if (line.trim()) {
      paragraph.push(line);
    } else {
      closeParagraph();
    }
  }
  closeParagraph();
  return nodes;
}
