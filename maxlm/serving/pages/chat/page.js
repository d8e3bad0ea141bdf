// The chat page: a conversation, or one text that the model continues.

const $ = (id) => document.getElementById(id);
const main = $('main');
const log = $('log');
const prompt = $('prompt');
const text = $('document');
// The conversation: { role, content, stats, error }. `stats` describes the number of tokens and the throughput.
let turns = loadItem('turns', []);
// Texts before each continuation, for undo.
let undoStack = [];
let model = null;
// True if the page shows the text editor, false for a conversation, null before the model is loaded.
let isTextShown = null;
// The response that is being streamed: { controller, turn }.
let running = null;

const isText = () => Boolean(model) && (!model.chat || settings.mode === 'text');

function resizePrompt() {
  prompt.style.height = 'auto';
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

const isAtEnd = () => main.scrollHeight - main.scrollTop - main.clientHeight < 40;

function scrollToEnd() {
  main.scrollTop = main.scrollHeight;
}

// Applies a change. A page that was scrolled to the end follows the end; otherwise the scroll position is kept.
function keepScroll(change) {
  const position = main.scrollTop;
  const follow = isAtEnd();
  change();
  if (follow) scrollToEnd();
  else main.scrollTop = position;
}

function renderTurns() {
  keepScroll(() => log.replaceChildren(...turns.map((turn, index) => renderTurn(turn, index))));
}

function renderTurn(turn, index) {
  const content = element('div', 'content');
  if (turn.role === 'user') content.textContent = turn.content;
  else content.append(...markdown(turn.content));
  const article = element('article', `turn ${turn.role}`, content);
  article.setAttribute('aria-label', turn.role === 'user' ? 'You' : 'Response');
  const isBusy = running?.turn === turn;
  article.classList.toggle('busy', isBusy);
  const tools = element('div', 'tools');
  if (!isBusy && turn.role === 'user') {
    tools.append(button('Edit', () => edit(index, article)));
  } else if (!isBusy) {
    const copyButton = button('Copy', () => copy(turn.content, copyButton));
    tools.append(copyButton, button('Retry', () => retry(index)), element('span', 'stats', turn.stats ?? ''));
  }
  article.append(tools);
  if (turn.error) {
    const error = renderError(turn.error, () => retry(index));
    article.replaceChildren(...(turn.content ? [content] : []), error);
  }
  return article;
}

function renderError(message, onRetry) {
  const node = element('div', 'error', element('span', '', message), button('Retry', onRetry, ''));
  node.setAttribute('role', 'alert');
  return node;
}

function edit(index, article) {
  if (running) return;
  const field = element('textarea', '');
  field.value = turns[index].content;
  field.setAttribute('aria-label', 'Edit the message');
  const send = () => {
    if (!field.value.trim()) return;
    turns = [...turns.slice(0, index), { role: 'user', content: field.value.trim() }];
    answer();
  };
  field.addEventListener('keydown', (event) => {
    if (isSend(event)) {
      event.preventDefault();
      send();
    } else if (event.key === 'Escape') {
      event.stopPropagation();
      renderTurns();
    }
  });
  const tools = element('div', 'tools', button('Cancel', renderTurns), button('Send', send, 'strong'));
  article.classList.add('edit');
  article.replaceChildren(field, tools);
  field.style.height = `${field.scrollHeight + 4}px`;
  field.focus();
}

function retry(index) {
  if (running) return;
  turns = turns.slice(0, index);
  answer();
}

const isSend = (event) => event.key === 'Enter' && !event.shiftKey && !event.isComposing;

// Streams a response into `turn` until it ends, is stopped or fails, and calls `render` after changes.
async function generate(path, body, turn, render) {
  const stats = new StreamStats();
  const controller = new AbortController();
  let isDue = false;
  running = { controller, turn };
  setBusy();
  const update = () => {
    isDue = false;
    if (running?.controller !== controller) return;
    render();
    $('speed').textContent = stats.summary;
  };
  try {
    for await (const chunk of stream(path, body, controller.signal)) {
      stats.add(chunk);
      turn.content += chunk.text;
      if (chunk.finish === 'length') turn.ended = 'length';
      // Rendering a long response is slow, so it is rendered less often.
      if (!isDue) setTimeout(update, Math.min(16 + turn.content.length / 200, 500));
      isDue = true;
    }
    $('status').textContent = 'The response is complete.';
  } catch (error) {
    if (error.name === 'AbortError') {
      turn.ended = 'stopped';
      $('status').textContent = 'Stopped.';
    } else {
      turn.error = error.message;
      if (error.status === 401) dialog.open();
    }
  }
  const endReasons = { length: 'token limit reached', stopped: 'stopped' };
  turn.stats = [stats.summary, endReasons[turn.ended]].filter(Boolean).join(' · ');
  running = null;
  $('speed').textContent = '';
  setBusy();
}

async function answer() {
  const turn = { role: 'assistant', content: '' };
  const messages = turns.filter((one) => one.content).map(({ role, content }) => ({ role, content }));
  if (settings.system.trim()) messages.unshift({ role: 'system', content: settings.system });
  storeItem('turns', turns);
  turns = [...turns, turn];
  running = { turn };
  renderTurns();
  scrollToEnd();
  const content = log.lastChild.querySelector('.content');
  const render = () => keepScroll(() => content.replaceChildren(...markdown(turn.content)));
  await generate('/v1/chat/completions', { model: model?.id, messages, ...sampling() }, turn, render);
  // The user may have started a new conversation in the meantime.
  if (!turns.includes(turn)) return;
  storeItem('turns', turns);
  renderTurns();
}

async function continueText() {
  const start = text.value;
  if (!start || running) return;
  undoStack.push(start);
  const turn = { content: '' };
  text.readOnly = true;
  const render = () => {
    const follow = text.scrollHeight - text.scrollTop - text.clientHeight < 60;
    text.value = start + turn.content;
    if (follow) text.scrollTop = text.scrollHeight;
  };
  await generate('/v1/completions', { model: model?.id, prompt: start, ...sampling() }, turn, render);
  render();
  text.readOnly = false;
  if (!turn.content) undoStack.pop();
  storeItem('text', text.value);
  $('speed').textContent = turn.stats;
  log.replaceChildren();
  if (turn.error) {
    log.append(renderError(turn.error, continueText));
  }
  setBusy();
}

function undo() {
  if (running || !undoStack.length) return;
  text.value = undoStack.pop();
  storeItem('text', text.value);
  setBusy();
}

function stop() {
  running?.controller?.abort();
}

function startNew() {
  stop();
  if (isText()) {
    if (text.value) undoStack.push(text.value);
    text.value = '';
  } else {
    turns = [];
    renderTurns();
  }
  storeItem('turns', turns);
  storeItem('text', text.value);
  setBusy();
  (isText() ? text : prompt).focus();
}

function setBusy() {
  const send = $('send');
  send.textContent = running ? 'Stop' : isText() ? 'Continue' : 'Send';
  send.disabled = !running && !(isText() ? text.value : prompt.value.trim());
  log.setAttribute('aria-busy', String(Boolean(running)));
  $('undo').hidden = $('retry').hidden = !isText();
  $('undo').disabled = $('retry').disabled = Boolean(running) || !undoStack.length;
}

function setMode() {
  const plain = isTextShown = isText();
  prompt.hidden = plain;
  $('editor').hidden = !plain;
  $('composer').classList.toggle('text', plain);
  log.dataset.empty = plain || !model ? '' : 'Send a message to start.';
  $('mode-choice').hidden = !model?.chat;
  const control = /Mac|iPhone|iPad/.test(navigator.platform) ? '⌘' : 'Ctrl+';
  $('keys').textContent = plain ? `${control}Enter continues · Esc stops` : 'Enter sends · Shift+Enter new line · Esc stops';
  if (plain) log.replaceChildren();
  else renderTurns();
  setBusy();
}

async function loadModel() {
  try {
    const models = await (await call('/v1/models')).json();
    model = models.data[0];
    settings.mode ||= 'chat';
    $('name').textContent = document.title = model.id;
    $('about').textContent = `step ${model.step}`;
    setMode();
  } catch (error) {
    log.replaceChildren(renderError(error.message, loadModel));
    if (error.status === 401) dialog.open();
  }
}

const dialog = setUpSettings({
  onChange: () => {
    if (!model) loadModel();
    else if (isText() !== isTextShown) setMode();
  },
});
$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  if (running) stop();
  else if (isText()) continueText();
  else if (prompt.value.trim()) {
    turns = [...turns.filter((turn) => !turn.error || turn.content), { role: 'user', content: prompt.value.trim() }];
    prompt.value = '';
    resizePrompt();
    answer();
  }
});
prompt.addEventListener('keydown', (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  if (!running) $('composer').requestSubmit();
});
text.addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) continueText();
});
prompt.addEventListener('input', () => {
  resizePrompt();
  setBusy();
});
text.addEventListener('input', () => {
  storeItem('text', text.value);
  setBusy();
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && !$('settings').open) stop();
  if (event.key.toLowerCase() === 'o' && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    startNew();
  }
});
main.addEventListener('scroll', () => {
  $('down').hidden = isAtEnd() || isText();
});
addEventListener('resize', resizePrompt);
$('down').addEventListener('click', scrollToEnd);
$('new').addEventListener('click', startNew);
$('undo').addEventListener('click', undo);
$('retry').addEventListener('click', () => {
  undo();
  continueText();
});
text.value = loadItem('text', '');
resizePrompt();
renderTurns();
scrollToEnd();
setBusy();
loadModel();
prompt.focus();
