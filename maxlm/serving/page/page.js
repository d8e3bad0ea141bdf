// The page: a conversation, or one text that the model goes on with.

const $ = (id) => document.getElementById(id);
const main = $('main');
const log = $('log');
const prompt = $('prompt');
const text = $('document');
// The conversation: { role, content, told, fault }. What is told of an answer: its tokens and their speed.
let turns = recall('turns', []);
// The text before each continuation, for undo.
let before = [];
let model = null;
// Whether the page shows one text.
let shownText = null;
// Of the answer that is coming.
let running = null;

const isText = () => Boolean(model) && (!model.chat || settings.mode === 'text');

function grow() {
  prompt.style.height = 'auto';
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

const isAtEnd = () => main.scrollHeight - main.scrollTop - main.clientHeight < 40;

function toEnd() {
  main.scrollTop = main.scrollHeight;
}

// Changes what is in sight: whoever reads the end goes on reading there, whoever reads above is left alone.
function following(change) {
  const place = main.scrollTop;
  const follow = isAtEnd();
  change();
  if (follow) toEnd();
  else main.scrollTop = place;
}

function show() {
  following(() => log.replaceChildren(...turns.map((turn, place) => shownTurn(turn, place))));
}

function shownTurn(turn, place) {
  const said = element('div', 'said');
  if (turn.role === 'user') said.textContent = turn.content;
  else said.append(...markdown(turn.content));
  const made = element('article', `turn ${turn.role}`, said);
  made.setAttribute('aria-label', turn.role === 'user' ? 'You' : 'Response');
  const isBusy = running?.turn === turn;
  made.classList.toggle('busy', isBusy);
  const tools = element('div', 'tools');
  if (!isBusy && turn.role === 'user') {
    tools.append(button('Edit', () => edit(place, made)));
  } else if (!isBusy) {
    const press = button('Copy', () => copy(turn.content, press));
    tools.append(press, button('Retry', () => retry(place)), element('span', 'told', turn.told ?? ''));
  }
  made.append(tools);
  if (turn.fault) {
    const fault = shownFault(turn.fault, () => retry(place));
    made.replaceChildren(...(turn.content ? [said] : []), fault);
  }
  return made;
}

function shownFault(message, act) {
  const made = element('div', 'fault', element('span', '', message), button('Try again', act, ''));
  made.setAttribute('role', 'alert');
  return made;
}

function edit(place, made) {
  if (running) return;
  const field = element('textarea', '');
  field.value = turns[place].content;
  field.setAttribute('aria-label', 'Edit the message');
  const save = () => {
    if (!field.value.trim()) return;
    turns = [...turns.slice(0, place), { role: 'user', content: field.value.trim() }];
    answer();
  };
  field.addEventListener('keydown', (event) => {
    if (isSend(event)) {
      event.preventDefault();
      save();
    } else if (event.key === 'Escape') {
      event.stopPropagation();
      show();
    }
  });
  const tools = element('div', 'tools', button('Cancel', show), button('Send', save, 'strong'));
  made.classList.add('edit');
  made.replaceChildren(field, tools);
  field.style.height = `${field.scrollHeight + 4}px`;
  field.focus();
}

function retry(place) {
  if (running) return;
  turns = turns.slice(0, place);
  answer();
}

const isSend = (event) => event.key === 'Enter' && !event.shiftKey && !event.isComposing;

// Draws into `take` until the end, the stop or a fault; what is then told of it.
async function draw(path, body, turn, take) {
  const pace = new Pace();
  const stopper = new AbortController();
  let isDue = false;
  running = { stopper, turn };
  setBusy();
  const update = () => {
    isDue = false;
    if (running?.stopper !== stopper) return;
    take();
    $('speed').textContent = pace.told;
  };
  try {
    for await (const chunk of stream(path, body, stopper.signal)) {
      pace.take(chunk);
      turn.content += chunk.text;
      if (chunk.finish === 'length') turn.ended = 'length';
      // Long answers take long to show.
      if (!isDue) setTimeout(update, Math.min(16 + turn.content.length / 200, 500));
      isDue = true;
    }
    $('status').textContent = 'The response is complete.';
  } catch (error) {
    if (error.name === 'AbortError') {
      turn.ended = 'stopped';
      $('status').textContent = 'Stopped.';
    } else {
      turn.fault = error.message;
      if (error.status === 401) dialog.open();
    }
  }
  const ends = { length: 'token limit reached', stopped: 'stopped' };
  turn.told = [pace.told, ends[turn.ended]].filter(Boolean).join(' · ');
  running = null;
  $('speed').textContent = '';
  setBusy();
}

async function answer() {
  const turn = { role: 'assistant', content: '' };
  const messages = turns.filter((one) => one.content).map(({ role, content }) => ({ role, content }));
  if (settings.system.trim()) messages.unshift({ role: 'system', content: settings.system });
  keep('turns', turns);
  turns = [...turns, turn];
  running = { turn };
  show();
  toEnd();
  const said = log.lastChild.querySelector('.said');
  const take = () => following(() => said.replaceChildren(...markdown(turn.content)));
  await draw('/v1/chat/completions', { model: model?.id, messages, ...sampling() }, turn, take);
  // Meanwhile the conversation may have been put away.
  if (!turns.includes(turn)) return;
  keep('turns', turns);
  show();
}

async function goOn() {
  const start = text.value;
  if (!start || running) return;
  before.push(start);
  const turn = { content: '' };
  text.readOnly = true;
  const take = () => {
    const follow = text.scrollHeight - text.scrollTop - text.clientHeight < 60;
    text.value = start + turn.content;
    if (follow) text.scrollTop = text.scrollHeight;
  };
  await draw('/v1/completions', { model: model?.id, prompt: start, ...sampling() }, turn, take);
  take();
  text.readOnly = false;
  if (!turn.content) before.pop();
  keep('text', text.value);
  $('speed').textContent = turn.told;
  log.replaceChildren();
  if (turn.fault) {
    log.append(shownFault(turn.fault, goOn));
  }
  setBusy();
}

function undo() {
  if (running || !before.length) return;
  text.value = before.pop();
  keep('text', text.value);
  setBusy();
}

function stop() {
  running?.stopper?.abort();
}

function startAnew() {
  stop();
  if (isText()) {
    if (text.value) before.push(text.value);
    text.value = '';
  } else {
    turns = [];
    show();
  }
  keep('turns', turns);
  keep('text', text.value);
  setBusy();
  (isText() ? text : prompt).focus();
}

function setBusy() {
  const send = $('send');
  send.textContent = running ? 'Stop' : isText() ? 'Continue' : 'Send';
  send.disabled = !running && !(isText() ? text.value : prompt.value.trim());
  log.setAttribute('aria-busy', String(Boolean(running)));
  $('undo').hidden = $('again').hidden = !isText();
  $('undo').disabled = $('again').disabled = Boolean(running) || !before.length;
}

function setMode() {
  const plain = shownText = isText();
  prompt.hidden = plain;
  $('editor').hidden = !plain;
  $('ask').classList.toggle('text', plain);
  log.dataset.empty = plain || !model ? '' : 'Send a message to begin.';
  $('mode-choice').hidden = !model?.chat;
  const control = /Mac|iPhone|iPad/.test(navigator.platform) ? '⌘' : 'Ctrl+';
  $('keys').textContent = plain ? `${control}Enter continues · Esc stops` : 'Enter sends · Shift+Enter new line · Esc stops';
  if (plain) log.replaceChildren();
  else show();
  setBusy();
}

async function meet() {
  try {
    const told = await (await call('/v1/models')).json();
    model = told.data[0];
    settings.mode ||= 'chat';
    $('name').textContent = document.title = model.id;
    $('about').textContent = `step ${model.step}`;
    setMode();
  } catch (error) {
    log.replaceChildren(shownFault(error.message, meet));
    if (error.status === 401) dialog.open();
  }
}

const dialog = setUpSettings({
  onChange: () => {
    if (!model) meet();
    else if (isText() !== shownText) setMode();
  },
});
$('ask').addEventListener('submit', (event) => {
  event.preventDefault();
  if (running) stop();
  else if (isText()) goOn();
  else if (prompt.value.trim()) {
    turns = [...turns.filter((turn) => !turn.fault || turn.content), { role: 'user', content: prompt.value.trim() }];
    prompt.value = '';
    grow();
    answer();
  }
});
prompt.addEventListener('keydown', (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  if (!running) $('ask').requestSubmit();
});
text.addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) goOn();
});
prompt.addEventListener('input', () => {
  grow();
  setBusy();
});
text.addEventListener('input', () => {
  keep('text', text.value);
  setBusy();
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && !$('settings').open) stop();
  if (event.key.toLowerCase() === 'o' && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    startAnew();
  }
});
main.addEventListener('scroll', () => {
  $('down').hidden = isAtEnd() || isText();
});
addEventListener('resize', grow);
$('down').addEventListener('click', toEnd);
$('new').addEventListener('click', startAnew);
$('undo').addEventListener('click', undo);
$('again').addEventListener('click', () => {
  undo();
  goOn();
});
text.value = recall('text', '');
grow();
show();
toEnd();
setBusy();
meet();
prompt.focus();
