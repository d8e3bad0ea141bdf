// What the browser keeps: settings and the conversation. Without storage they live as long as the page.

const DEFAULTS = { mode: '', system: '', temperature: '', top_p: '', max_tokens: '', seed: '', key: '' };
const settings = { ...DEFAULTS, ...recall('settings', {}) };

function recall(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`maxlm.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(`maxlm.${name}`, JSON.stringify(value));
  } catch {
    // Storage is full or not allowed.
  }
}

// The parameters of a request.
function sampling() {
  const asked = {};
  for (const name of ['temperature', 'top_p', 'max_tokens', 'seed']) {
    if (settings[name] !== '') asked[name] = Number(settings[name]);
  }
  return asked;
}

function setUpSettings({ onChange }) {
  const dialog = document.getElementById('settings');
  const form = document.getElementById('settings-form');
  const fill = () => { for (const name in DEFAULTS) form.elements[name].value = settings[name]; };
  const take = () => {
    for (const name in DEFAULTS) {
      const field = form.elements[name];
      // What is no number of the field's range stays as it was.
      if (field instanceof RadioNodeList || field.checkValidity()) settings[name] = field.value;
    }
    keep('settings', settings);
  };
  const open = () => {
    fill();
    if (!dialog.open) dialog.showModal();
  };
  document.getElementById('open-settings').addEventListener('click', open);
  document.getElementById('reset').addEventListener('click', () => {
    Object.assign(settings, DEFAULTS, { mode: settings.mode, key: settings.key });
    fill();
    keep('settings', settings);
  });
  form.addEventListener('input', take);
  dialog.addEventListener('close', onChange);
  // A click beside it.
  dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
  return { open };
}
