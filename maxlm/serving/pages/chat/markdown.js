// Markdown of responses. markdown-it creates HTML, and DOMPurify allows only the elements that are listed here.

// A block or response beyond these limits continues as plain text, so that no update takes long.
const MAX_BLOCK_CHARS = 40_000;
const MAX_BLOCK_TOKENS = 15_000;
const MAX_TOKENS = 200_000;
// Lists and quotes that are nested more deeply are shown as text.
const MAX_DEPTH = 16;
// New text of one update, unless its block is longer.
const STEP_CHARS = 4000;
// Plain text is divided into paragraphs, because the time to break text into lines can be quadratic in its length.
const PLAIN_CHARS = 4000;
// Time after which other tasks of the page get their turn.
const STEP_MS = 30;

const LINK = /^(?:https?:\/\/|mailto:)/i;
const SANITIZER = {
  ALLOWED_TAGS: [
    'p', 'h3', 'h4', 'h5', 'h6', 'ul', 'ol', 'li', 'blockquote', 'pre', 'code', 'em', 'strong', 's', 'a', 'hr',
    'table', 'thead', 'tbody', 'tr', 'th', 'td',
  ],
  ALLOWED_ATTR: ['href', 'start', 'align', 'class'],
  ADD_URI_SAFE_ATTR: ['start', 'align'],
  ALLOWED_URI_REGEXP: LINK,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
// TeX between \( \), \[ \], $$ $$ or $ $, whose backslashes and asterisks are not Markdown.
const MATH = /\\\((?:(?!\\[()])[^])*\\\)|\\\[(?:(?!\\[[\]])[^])*\\\]|\$\$[^$]+\$\$|\$(?!\s)[^$\n]*[^$\s]\$(?!\d)/y;

function makeParser() {
  // Images would send data to other hosts. A reference can change text that precedes its definition.
  const parser = markdownit().disable(['image', 'reference']);
  parser.validateLink = (url) => LINK.test(url);
  parser.block.ruler.before('table', 'depth', (state, startLine, endLine, silent) => {
    if (silent || state.level < MAX_DEPTH) return false;
    // An item of a list ends before a line that is indented less.
    const isInside = (line) => state.isEmpty(line) || state.sCount[line] >= state.blkIndent;
    do state.line++; while (state.line < endLine && isInside(state.line));
    state.push('paragraph_open', 'p', 1);
    const inline = state.push('inline', '', 0);
    inline.content = state.getLines(startLine, state.line, state.blkIndent, false);
    inline.children = [];
    state.push('paragraph_close', 'p', -1);
    return true;
  });
  parser.inline.ruler.before('escape', 'math', (state, silent) => {
    MATH.lastIndex = state.pos;
    const match = '\\$'.includes(state.src[state.pos]) && MATH.exec(state.src);
    if (!match) return false;
    if (!silent) state.pending += match[0];
    state.pos += match[0].length;
    return true;
  });
  // Line breaks and the indentation of lines are kept, since models write code and verses without a fence.
  parser.inline.ruler.at('newline', (state, silent) => {
    if (state.src[state.pos] !== '\n') return false;
    if (!silent) state.pending += '\n';
    state.pos++;
    return true;
  });
  parser.renderer.rules.hardbreak = () => '\n';
  parser.core.ruler.push('elements', ({ tokens }) => {
    for (const token of tokens) {
      // The page has the headings of levels 1 and 2.
      if (token.type.startsWith('heading')) token.tag = `h${Math.min(Number(token.tag[1]) + 2, 6)}`;
      if (token.type.startsWith('paragraph')) token.hidden = false;
      // The policy of the page forbids the attribute `style`.
      const style = token.attrGet('style');
      if (style) token.attrs = [['align', style.replace('text-align:', '')]];
    }
  });
  return parser;
}

const parser = makeParser();

function codeBlock(code) {
  const text = code.textContent.replace(/\n$/, '');
  const [, language] = /^language-([\w+#.-]{1,40})/.exec(code.className) ?? [];
  const bar = element('div', 'bar', element('span', '', language ?? 'code'));
  const copyButton = button('Copy', () => copy(text, copyButton));
  bar.append(copyButton);
  const block = element('pre', '', element('code', '', text));
  block.tabIndex = 0;
  return element('div', 'code', bar, block);
}

// Returns a document fragment with one element for each block.
function renderTokens(tokens) {
  const fragment = DOMPurify.sanitize(parser.renderer.render(tokens, parser.options, {}), SANITIZER);
  for (const block of fragment.querySelectorAll('pre')) block.replaceWith(codeBlock(block.firstElementChild));
  for (const table of fragment.querySelectorAll('table')) {
    const box = element('div', 'table');
    box.tabIndex = 0;
    table.replaceWith(box);
    box.append(table);
  }
  for (const link of fragment.querySelectorAll('a')) {
    link.target = '_blank';
    link.rel = 'noopener noreferrer';
  }
  // Text that begins with Arabic or Hebrew, and its lists and tables, run from right to left.
  for (const block of fragment.children) block.dir = 'auto';
  return fragment;
}

// Counts the tokens of blocks, and a block of code as ten because of its elements.
const countTokens = (tokens) => tokens.reduce(
  (sum, { type, children }) => sum + (children?.length ?? 0) + (/^(fence|code_block)$/.test(type) ? 10 : 1), 0,
);

// Views whose text is not completely shown.
const waiting = new Set();
let isRenderDue = false;

// Shows text that grows. Only the last block is rendered again, because later text cannot change the blocks before it.
class MarkdownView {
  constructor() {
    this.node = element('div', 'content');
    this.text = '';
    // The shown text ends here, and its last block starts here.
    this.end = this.start = 0;
    // Blocks before the last one, and their tokens.
    this.numBlocks = this.numTokens = 0;
    // The last text node beyond the limits.
    this.plain = null;
  }

  // Sets the text, which starts with the former text.
  set(text) {
    this.text = text.replace(/\r\n?/g, '\n');
    if (this.isBehind) waiting.add(this);
  }

  get isBehind() {
    return this.end < this.text.length;
  }

  // Shows more of the text.
  step() {
    if (this.plain) {
      this.stepPlain();
      return;
    }
    const shown = this.end;
    // A long block is rendered again only after it has doubled.
    this.end = Math.min(this.text.length, shown + Math.max(STEP_CHARS, shown - this.start));
    const part = this.text.slice(this.start, this.end);
    const tokens = parser.parse(part, {});
    const numTokens = countTokens(tokens);
    while (this.node.childElementCount > this.numBlocks) this.node.lastChild.remove();
    if (part.length > MAX_BLOCK_CHARS || numTokens > MAX_BLOCK_TOKENS || this.numTokens + numTokens > MAX_TOKENS) {
      this.end = this.start;
      this.addPlain();
      return;
    }
    this.node.append(...renderTokens(tokens).children);
    const lines = part.split('\n');
    const starts = [...tokens.keys()].filter((index) => !tokens[index].level && tokens[index].nesting >= 0);
    // The type of a block is certain when its first two lines are complete: the second line makes the first one a table.
    const last = starts.findLastIndex((index) => tokens[index].map[0] < lines.length - 2);
    if (last <= 0) return;
    this.numBlocks += last;
    this.numTokens += countTokens(tokens.slice(0, starts[last]));
    this.start += lines.slice(0, tokens[starts[last]].map[0]).join('\n').length + 1;
  }

  // Adds a paragraph of plain text.
  addPlain() {
    this.plain = new Text();
    this.node.append(element('p', 'plain', this.plain));
  }

  // Shows more of the plain text. A paragraph ends with a line, unless the line is long.
  stepPlain() {
    const next = this.text.slice(this.end, this.end + PLAIN_CHARS);
    const lines = next.slice(0, next.lastIndexOf('\n') + 1) || next;
    const { data, length } = this.plain;
    const isFull = length + lines.length > PLAIN_CHARS && (data.endsWith('\n') || length >= PLAIN_CHARS);
    if (isFull) this.addPlain();
    this.plain.appendData(lines);
    this.end += lines.length;
  }
}

// Renders the waiting views, the last one first, and continues later if that takes long.
function renderWaiting() {
  const end = performance.now() + STEP_MS;
  for (const view of [...waiting].reverse()) {
    do view.step(); while (view.isBehind && performance.now() < end);
    if (!view.isBehind) waiting.delete(view);
    if (performance.now() >= end) break;
  }
  if (!waiting.size || isRenderDue) return;
  isRenderDue = true;
  setTimeout(() => {
    isRenderDue = false;
    keepScroll(renderWaiting);
  });
}
