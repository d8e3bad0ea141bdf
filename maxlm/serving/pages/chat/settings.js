// Settings, and access to localStorage. If it is unavailable, everything is lost when the page closes.

const DEFAULTS = { mode: '', system: '', temperature: '', top_p: '', top_k: '', min_p: '', max_tokens: '', seed: '', key: '' };
const SAMPLING = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed'];
const settings = loadSettings();

function loadSettings() {
  const stored = loadItem('settings', {});
  const valid = Object.keys(DEFAULTS).filter((name) => typeof stored[name] === 'string');
  return { ...DEFAULTS, ...Object.fromEntries(valid.map((name) => [name, stored[name]])) };
}

function loadItem(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`maxlm.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

// Returns false if the storage is full or blocked.
function storeItem(name, value) {
  try {
    localStorage.setItem(`maxlm.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

function removeItem(name) {
  try {
    localStorage.removeItem(`maxlm.${name}`);
  } catch {
    // The storage is blocked.
  }
}

// Returns the sampling parameters of a request.
function sampling() {
  const parameters = {};
  for (const name of SAMPLING) {
    if (settings[name] !== '') parameters[name] = Number(settings[name]);
  }
  return parameters;
}

function setUpSettings({ onChange }) {
  const dialog = document.getElementById('settings');
  const form = document.getElementById('settings-form');
  const fillForm = () => { for (const name in DEFAULTS) form.elements[name].value = settings[name]; };
  const readForm = () => {
    for (const name in DEFAULTS) {
      const field = form.elements[name];
      // An invalid number does not replace the stored value.
      if (field instanceof RadioNodeList || field.checkValidity()) settings[name] = field.value;
    }
    storeItem('settings', settings);
  };
  const open = () => {
    fillForm();
    if (!dialog.open) dialog.showModal();
  };
  document.getElementById('open-settings').addEventListener('click', open);
  document.getElementById('reset').addEventListener('click', () => {
    Object.assign(settings, DEFAULTS, { mode: settings.mode, key: settings.key });
    fillForm();
    storeItem('settings', settings);
  });
  form.addEventListener('input', readForm);
  dialog.addEventListener('close', onChange);
  // A click outside the dialog closes it.
  dialog.addEventListener('click', (event) => { if (event.target === dialog) dialog.close(); });
  return { open };
}
