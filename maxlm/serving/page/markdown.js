// Of Markdown what answers have most: code, lists, headings, emphasis. Text only ever becomes text nodes.

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function button(label, act, className = 'quiet') {
  const made = element('button', className, label);
  made.type = 'button';
  made.addEventListener('click', act);
  return made;
}

async function copy(text, from) {
  try {
    await navigator.clipboard.writeText(text);
    from.textContent = 'Copied';
  } catch {
    from.textContent = 'Not allowed';
  }
  setTimeout(() => { from.textContent = 'Copy'; }, 1500);
}

function codeBlock(language, text) {
  const bar = element('div', 'bar', element('span', '', language || 'code'));
  const press = button('Copy', () => copy(text, press));
  bar.append(press);
  const shown = element('pre', '', element('code', '', text));
  shown.tabIndex = 0;
  return element('div', 'code', bar, shown);
}

function inline(text) {
  const made = [];
  const marks = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(\S(?:[^\n]*?\S)?)\*\*|\*(\S(?:[^*\n]*?\S)?)\*/g;
  let place = 0;
  for (const found of text.matchAll(marks)) {
    made.push(text.slice(place, found.index));
    if (found[1]) made.push(element('code', '', found[2]));
    else if (found[3]) made.push(element('strong', '', found[3]));
    else made.push(element('em', '', found[4]));
    place = found.index + found[0].length;
  }
  made.push(text.slice(place));
  return made;
}

const ITEM = /^\s*(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;

function markdown(text) {
  const made = [];
  const lines = text.split('\n');
  let paragraph = [];
  const close = () => {
    if (paragraph.length) made.push(element('p', '', ...inline(paragraph.join('\n'))));
    paragraph = [];
  };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const fence = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/.exec(line);
    const heading = /^#{1,6}\s+(.*)$/.exec(line);
    const item = ITEM.exec(line);
    if (fence) {
      close();
      const inner = [];
      while (++i < lines.length && !lines[i].trim().startsWith(fence[1])) inner.push(lines[i]);
      made.push(codeBlock(fence[2], inner.join('\n')));
    } else if (heading) {
      close();
      made.push(element('h3', '', ...inline(heading[1])));
    } else if (item) {
      close();
      const list = element(item[1] ? 'ul' : 'ol', '');
      if (item[2]) list.start = Number(item[2]);
      for (let next = item; next && Boolean(next[1]) === Boolean(item[1]); next = ITEM.exec(lines[++i] ?? '')) {
        list.append(element('li', '', ...inline(next[3])));
      }
      i--;
      made.push(list);
    } else if (line.startsWith('>')) {
      close();
      const said = [];
      for (; (lines[i] ?? '').startsWith('>'); i++) said.push(lines[i].replace(/^>\s?/, ''));
      i--;
      made.push(element('blockquote', '', ...inline(said.join('\n'))));
    } else if (line.trim()) {
      paragraph.push(line);
    } else {
      close();
    }
  }
  close();
  return made;
}
