// The chat page: a conversation, or one text that the model continues.

const $ = (id) => document.getElementById(id);
const main = $('main');
const log = $('log');
const prompt = $('prompt');
const text = $('document');
// The conversation or text that the page shows.
let current = newConversation('chat');
// Its turns: { role, content, stats, error }. `stats` describes the number of tokens and the throughput.
let turns = [];
// Texts before each continuation, for undo.
let undoStack = [];
let model = null;
// True if the page shows the text editor, false for a conversation, null before the model is loaded.
let isTextShown = null;
// The response that is being streamed: { controller, turn }.
let running = null;
// Views of the responses by turn.
const views = new Map();

const isText = () => Boolean(model) && (!model.chat || settings.mode === 'text');
const kind = () => (isText() ? 'text' : 'chat');

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

function announce(message) {
  $('status').textContent = message;
}

// Stores a conversation, unless the user has deleted it in the meantime.
function save(conversation) {
  if (conversation.isDeleted) return;
  conversation.updated = Date.now();
  conversation.model = model?.id ?? '';
  $('warning').hidden = saveConversation(conversation);
  sidebar.render();
}

function saveText() {
  current.text = text.value;
  if (text.value || conversations.has(current.id)) save(current);
}

function renderTurns() {
  keepScroll(() => {
    const { dropped, unseen } = unseenTurns(turns);
    const nodes = turns.map((turn, index) => renderTurn(turn, index, unseen.includes(turn)));
    if (dropped.length) {
      const note = 'The context is full. The model no longer sees the messages above.';
      nodes.splice(turns.indexOf(dropped.at(-1)) + 1, 0, element('p', 'divider', note));
    }
    log.replaceChildren(...nodes);
    renderWaiting();
  });
}

// Returns the view of a response, which shows its current text after the next `renderWaiting`.
function viewOf(turn) {
  if (!views.has(turn)) views.set(turn, new MarkdownView());
  views.get(turn).set(turn.content);
  return views.get(turn);
}

function renderTurn(turn, index, isUnseen) {
  const content = turn.role === 'user' ? element('div', 'content', turn.content) : viewOf(turn).node;
  const article = element('article', `turn ${turn.role}`, content);
  article.setAttribute('aria-label', turn.role === 'user' ? 'You' : 'Response');
  const isBusy = running?.turn === turn;
  article.classList.toggle('busy', isBusy);
  article.classList.toggle('unseen', isUnseen);
  if (isUnseen) article.title = 'The model does not see this message.';
  const tools = element('div', 'tools');
  if (!isBusy && turn.role === 'user') {
    tools.append(button('Edit', () => edit(index, article)));
  } else if (!isBusy) {
    const copyButton = button('Copy', () => copy(turn.content, copyButton));
    tools.append(copyButton, button('Retry', () => retry(index)), element('span', 'stats', turn.stats ?? ''));
  }
  article.append(tools);
  if (turn.error) {
    const editMessage = () => edit(index - 1, log.querySelectorAll('.turn')[index - 1]);
    const error = renderError(turn.error, canRetry(turn) && (() => retry(index)), turn.isTooLong && editMessage);
    article.replaceChildren(...(turn.content ? [content] : []), error);
  }
  return article;
}

// Returns false if the same request would fail again: the prompt alone is too long, and no setting adds to it.
const canRetry = (turn) => !turn.isTooLong || Boolean(settings.max_tokens || settings.system.trim());

function renderError(message, onRetry, onEdit) {
  const node = element('div', 'error', element('span', '', message));
  if (onEdit) node.append(button('Edit message', onEdit, ''));
  if (onRetry) node.append(button('Retry', onRetry, ''));
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

// Answers again.
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
  let milliseconds = 0;
  running = { controller, turn };
  setBusy();
  const update = () => {
    isDue = false;
    if (running?.controller !== controller) return;
    const start = performance.now();
    render();
    milliseconds = performance.now() - start;
    $('speed').textContent = stats.summary;
  };
  try {
    for await (const chunk of stream(path, body, controller.signal)) {
      stats.add(chunk);
      turn.content += chunk.text;
      turn.numDropped = chunk.dropped;
      if (chunk.finish === 'length') turn.ended = 'length';
      // Rendering takes at most a fifth of the time.
      if (!isDue) setTimeout(update, Math.max(16, 4 * milliseconds));
      isDue = true;
    }
    announce('The response is complete.');
  } catch (error) {
    if (error.name === 'AbortError') {
      turn.ended = 'stopped';
      announce('Stopped.');
    } else {
      turn.error = error.message;
      turn.isTooLong = error.code === 'context_length_exceeded';
      if (error.status === 401) dialog.open();
    }
  }
  const endReasons = { length: 'token limit reached', stopped: 'stopped' };
  turn.stats = [stats.summary, endReasons[turn.ended]].filter(Boolean).join(' · ');
  running = null;
  $('speed').textContent = '';
  setBusy();
}

// Answers the last message. The server drops the oldest turns if the conversation does not fit the context.
async function answer() {
  const turn = { role: 'assistant', content: '' };
  const messages = sentTurns(turns).map(({ role, content }) => ({ role, content }));
  const system = settings.system.trim();
  if (system) messages.unshift({ role: 'system', content: settings.system });
  const conversation = current;
  conversation.system = system;
  conversation.turns = turns;
  save(conversation);
  conversation.turns = turns = [...turns, turn];
  running = { turn };
  renderTurns();
  scrollToEnd();
  let numShown = 0;
  const render = () => {
    viewOf(turn);
    if (turn.numDropped !== numShown) renderTurns();
    else keepScroll(renderWaiting);
    numShown = turn.numDropped;
  };
  const body = { model: model?.id, messages, truncation: 'auto', ...sampling() };
  await generate('/v1/chat/completions', body, turn, render);
  save(conversation);
  // The user may have opened another conversation in the meantime.
  if (conversation !== current) return;
  renderTurns();
}

async function continueText() {
  const start = text.value;
  if (!start || running) return;
  undoStack.push(start);
  const turn = { content: '' };
  const entry = current;
  text.readOnly = true;
  const render = () => {
    if (entry !== current) return;
    const follow = text.scrollHeight - text.scrollTop - text.clientHeight < 60;
    text.value = start + turn.content;
    if (follow) text.scrollTop = text.scrollHeight;
  };
  await generate('/v1/completions', { model: model?.id, prompt: start, ...sampling() }, turn, render);
  entry.text = start + turn.content;
  save(entry);
  // The user may have opened another text in the meantime.
  if (entry !== current) return;
  render();
  text.readOnly = false;
  if (!turn.content) undoStack.pop();
  $('speed').textContent = turn.stats;
  log.replaceChildren();
  if (turn.error) {
    log.append(renderError(turn.error, canRetry(turn) && continueText));
  }
  setBusy();
}

function undo() {
  if (running || !undoStack.length) return;
  text.value = undoStack.pop();
  saveText();
  setBusy();
}

function stop() {
  running?.controller?.abort();
}

// Shows a conversation or text, and stops the response of the former one.
function openConversation(conversation) {
  stop();
  current = conversation;
  rememberShown(conversation);
  turns = conversation.turns;
  views.clear();
  waiting.clear();
  undoStack = [];
  text.value = conversation.text;
  text.readOnly = false;
  $('speed').textContent = '';
  $('warning').hidden = true;
  log.replaceChildren();
  if (!isText()) renderTurns();
  scrollToEnd();
  sidebar.render();
  setBusy();
  focusInput();
}

// Focuses the input, except on touch screens, where it would open the keyboard.
function focusInput() {
  (matchMedia('(pointer: coarse)').matches ? main : isText() ? text : prompt).focus();
}

function startNew() {
  openConversation(newConversation(kind()));
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
  const name = plain ? 'text' : 'conversation';
  $('new').textContent = `New ${name}`;
  $('sidebar-title').textContent = plain ? 'Texts' : 'Conversations';
  $('no-conversations').textContent = `Each ${name} appears here and stays in this browser.`;
  const former = shownBefore();
  openConversation(former?.kind === kind() ? former : newConversation(kind()));
}

async function loadModel() {
  try {
    const models = await (await call('/v1/models')).json();
    model = models.data[0];
    settings.mode ||= 'chat';
    $('name').textContent = document.title = model.id;
    $('open-info').disabled = false;
    $('open-info').setAttribute('aria-label', `${model.id}: model information`);
    document.querySelector('[name=max_tokens]').max = model.max_tokens || model.max_model_len;
    showInfo(model);
    setMode();
    // Last, because it shows that the page is ready.
    $('about').textContent = `step ${model.step}`;
  } catch (error) {
    log.replaceChildren(renderError(error.message, loadModel));
    $('open-info').disabled = true;
    if (error.status === 401) dialog.open();
  }
}

const sidebar = setUpSidebar({ kind, current: () => current, open: openConversation, startNew, announce });
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
  saveText();
  setBusy();
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && !document.querySelector('dialog[open]')) stop();
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
$('undo').addEventListener('click', undo);
$('retry').addEventListener('click', () => {
  undo();
  continueText();
});
loadConversations();
convertFormerItems();
sidebar.render();
resizePrompt();
setBusy();
loadModel();
