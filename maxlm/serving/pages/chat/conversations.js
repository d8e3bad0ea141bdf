// Conversations and texts in localStorage, each under its own key, so that tabs do not overwrite each other.

const KEY_PREFIX = 'maxlm.conversation.';
const MAX_TITLE = 60;
// By id. Contains also conversations that could not be stored.
const conversations = new Map();

// Returns an empty conversation, or an empty text to continue. It is listed from the first `saveConversation`.
function newConversation(kind) {
  // crypto.randomUUID requires HTTPS or a local server.
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
  return { id, kind, title: '', updated: 0, model: '', system: '', turns: [], text: '' };
}

// Returns true if this page can have stored an entry.
function isConversation(entry) {
  const isTurn = (turn) => ['user', 'assistant'].includes(turn?.role) && typeof turn.content === 'string';
  const areTexts = ['id', 'kind', 'title', 'text'].every((name) => typeof entry?.[name] === 'string');
  return areTexts && Array.isArray(entry.turns) && entry.turns.every(isTurn);
}

// Reads the stored conversations. An entry that this page cannot have written is ignored.
function loadConversations() {
  conversations.clear();
  try {
    for (const key of Object.keys(localStorage)) {
      if (!key.startsWith(KEY_PREFIX)) continue;
      const entry = loadItem(key.slice('maxlm.'.length), null);
      if (isConversation(entry)) conversations.set(entry.id, entry);
    }
  } catch {
    // The storage is blocked.
  }
}

// Returns the turns that a request contains. A message without a response is left out once another one follows it,
// since it may not fit the context, and chat templates may require alternating roles.
function sentTurns(turns) {
  const filled = turns.filter((turn) => turn.content);
  return filled.filter((turn, index) => turn.role !== 'user' || filled[index + 1]?.role !== 'user');
}

// Returns the turns that the model does not see: those without a response, and the oldest ones that the server dropped
// for the last response because the context was full.
function unseenTurns(turns) {
  const last = turns.findLastIndex((turn) => turn.numDropped !== undefined);
  const sent = sentTurns(last < 0 ? turns : turns.slice(0, last));
  const dropped = last < 0 ? [] : sent.slice(0, turns[last].numDropped);
  const seen = sentTurns(turns).filter((turn) => !dropped.includes(turn));
  return { dropped, unseen: turns.filter((turn) => turn.content && !seen.includes(turn)) };
}

// Lists and stores a conversation. Returns false if the browser refuses to store it.
function saveConversation(conversation) {
  conversations.set(conversation.id, conversation);
  return storeItem(`conversation.${conversation.id}`, conversation);
}

function deleteConversation(conversation) {
  conversations.delete(conversation.id);
  conversation.isDeleted = true;
  removeItem(`conversation.${conversation.id}`);
}

// Remembers which conversation this tab shows, for a reload.
function rememberShown(conversation) {
  try {
    sessionStorage.setItem('maxlm.shown', conversation.id);
  } catch {
    // The storage is blocked.
  }
}

// Returns the conversation that this tab showed before a reload, if it still exists.
function shownBefore() {
  try {
    return conversations.get(sessionStorage.getItem('maxlm.shown'));
  } catch {
    return undefined;
  }
}

// Converts the single conversation and text that former versions of this page stored.
function convertFormerItems() {
  const chat = { ...newConversation('chat'), updated: Date.now(), turns: loadItem('turns', []) };
  const text = { ...newConversation('text'), updated: Date.now(), text: loadItem('text', '') };
  if (isConversation(chat) && chat.turns.length) saveConversation(chat);
  if (isConversation(text) && text.text) saveConversation(text);
  removeItem('turns');
  removeItem('text');
}

// Returns the conversations of a kind, the most recent first.
function listConversations(kind) {
  return [...conversations.values()].filter((one) => one.kind === kind).sort((a, b) => b.updated - a.updated);
}

function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const start = conversation.kind === 'text' ? conversation.text : conversation.turns[0]?.content ?? '';
  const line = start.trim().split('\n')[0];
  return (line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line) || 'Untitled';
}

// Returns the fields of an export. `messages` and `text` are formats that `maxlm prepare` reads.
function exported(conversation) {
  const { kind, model, system, turns, text, updated } = conversation;
  const messages = turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: 'system', content: system });
  const content = kind === 'text' ? { text } : { messages };
  return { title: titleOf(conversation), model, updated: new Date(updated).toISOString(), ...content };
}

function asMarkdown(conversation) {
  const { title, model, text, messages } = exported(conversation);
  const names = { system: 'System', user: 'You', assistant: model || 'Response' };
  const parts = messages?.map(({ role, content }) => `## ${names[role]}\n\n${content}`) ?? [text];
  return `${[`# ${title}`, ...parts].join('\n\n')}\n`;
}

function exportConversation(conversation, format) {
  const name = titleOf(conversation).replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '') || 'conversation';
  if (format === 'md') download(`${name}.md`, 'text/markdown', asMarkdown(conversation));
  else download(`${name}.json`, 'application/json', `${JSON.stringify(exported(conversation), null, 2)}\n`);
}

// Exports conversations as JSON lines, which `maxlm prepare` reads.
function exportAll(list) {
  const lines = list.map((one) => `${JSON.stringify(exported(one))}\n`);
  download('conversations.jsonl', 'application/jsonl', lines.join(''));
}

function download(name, type, content) {
  const link = element('a', '');
  link.href = URL.createObjectURL(new Blob([content], { type: `${type};charset=utf-8` }));
  link.download = name;
  link.click();
  // The browser may read the address after the click.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
