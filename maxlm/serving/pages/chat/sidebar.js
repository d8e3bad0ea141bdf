// The sidebar: the list of conversations. On narrow screens it is a drawer above the page.

// `kind` and `current` return what the page shows; `open` shows a conversation, and `announce` informs screen readers.
function setUpSidebar({ kind, current, open, startNew, announce }) {
  const sidebar = document.getElementById('sidebar');
  const list = document.getElementById('conversations');
  const toggle = document.getElementById('toggle-sidebar');
  const page = document.getElementById('page');
  const isNarrow = matchMedia('(max-width: 56rem)');
  // The conversation whose actions are shown, or whose title is edited.
  let expanded = null;
  let renamed = null;

  function show(isOpen, { focus = true } = {}) {
    const isDrawer = isNarrow.matches && isOpen;
    document.body.classList.toggle('with-sidebar', isOpen);
    sidebar.inert = !isOpen;
    // The page behind a drawer receives no focus and is hidden from screen readers.
    page.inert = isDrawer;
    toggle.setAttribute('aria-expanded', String(isOpen));
    sidebar.setAttribute('role', isDrawer ? 'dialog' : 'navigation');
    sidebar.ariaModal = isDrawer ? 'true' : null;
    if (!focus) return;
    if (isDrawer) document.getElementById('close-sidebar').focus();
    else if (!isOpen) toggle.focus();
  }

  const isOpen = () => document.body.classList.contains('with-sidebar');
  const closeDrawer = () => { if (isNarrow.matches) show(false, { focus: false }); };

  function render() {
    // A title that is being edited must not be replaced; the end of the edit renders the list.
    if (renamed && list.querySelector('input')) return;
    const entries = listConversations(kind());
    const item = document.activeElement.closest('#conversations li');
    const position = item && [...item.querySelectorAll('button')].indexOf(document.activeElement);
    list.replaceChildren(...entries.map(renderEntry));
    if (item) entryOf(item.dataset.id)?.querySelectorAll('button')[position]?.focus();
    document.getElementById('no-conversations').hidden = entries.length > 0;
    document.getElementById('export-all').disabled = !entries.length;
  }

  function renderEntry(conversation) {
    const title = titleOf(conversation);
    const item = element('li', '');
    item.dataset.id = conversation.id;
    if (renamed === conversation) {
      item.append(renderTitleField(conversation));
      return item;
    }
    const openButton = button(title, () => {
      closeDrawer();
      open(conversation);
    }, 'entry');
    openButton.title = title;
    if (conversation === current()) openButton.setAttribute('aria-current', 'true');
    const isExpanded = expanded === conversation;
    const more = button('⋯', () => {
      expanded = isExpanded ? null : conversation;
      render();
    }, 'quiet more');
    more.setAttribute('aria-label', `Actions for ${title}`);
    more.setAttribute('aria-expanded', String(isExpanded));
    const row = element('div', 'row', openButton, more);
    item.append(row);
    if (isExpanded) item.append(renderActions(conversation));
    return item;
  }

  function renderActions(conversation) {
    return element(
      'div', 'actions',
      button('Rename', () => {
        renamed = conversation;
        render();
        const field = list.querySelector('input');
        field.focus();
        field.select();
      }),
      button('Export JSON', () => exportConversation(conversation, 'json')),
      button('Export Markdown', () => exportConversation(conversation, 'md')),
      button('Delete', () => confirmDeletion(conversation), 'quiet danger'),
    );
  }

  function renderTitleField(conversation) {
    const field = element('input', '');
    field.value = titleOf(conversation);
    field.maxLength = 200;
    field.setAttribute('aria-label', 'Title');
    const finish = (isAccepted) => {
      if (renamed !== conversation) return;
      renamed = null;
      if (isAccepted && field.value.trim() && field.value.trim() !== titleOf(conversation)) {
        conversation.title = field.value.trim();
        saveConversation(conversation);
      }
      render();
    };
    field.addEventListener('keydown', (event) => {
      if ((event.key !== 'Enter' || event.isComposing) && event.key !== 'Escape') return;
      event.preventDefault();
      event.stopPropagation();
      finish(event.key === 'Enter');
      focusIn(conversation, '.entry');
    });
    field.addEventListener('blur', () => finish(true));
    return field;
  }

  const entryOf = (id) => list.querySelector(`[data-id="${CSS.escape(id)}"]`);
  const focusIn = (conversation, selector) => entryOf(conversation.id)?.querySelector(selector)?.focus();

  function confirmDeletion(conversation) {
    const dialog = document.getElementById('confirm');
    // Characters of the title that change the direction of text do not affect the rest of the question.
    const title = element('bdi', '', titleOf(conversation));
    document.getElementById('confirm-text').replaceChildren('Delete “', title, '”? This cannot be undone.');
    dialog.returnValue = '';
    dialog.onclose = () => {
      if (dialog.returnValue !== 'delete') return;
      const entries = listConversations(kind());
      const next = entries[entries.indexOf(conversation) + 1] ?? entries[entries.indexOf(conversation) - 1];
      deleteConversation(conversation);
      if (conversation === current()) startNew();
      render();
      announce('Deleted.');
      if (next) focusIn(next, '.entry');
      else if (isNarrow.matches) document.getElementById('close-sidebar').focus();
    };
    dialog.showModal();
  }

  toggle.addEventListener('click', () => show(!isOpen()));
  document.getElementById('close-sidebar').addEventListener('click', () => show(false));
  document.getElementById('backdrop').addEventListener('click', () => show(false));
  document.getElementById('export-all').addEventListener('click', () => exportAll(listConversations(kind())));
  for (const id of ['new', 'new-narrow']) {
    document.getElementById(id).addEventListener('click', () => {
      closeDrawer();
      startNew();
    });
  }
  sidebar.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape') return;
    if (expanded) {
      const conversation = expanded;
      expanded = null;
      render();
      focusIn(conversation, '.more');
    } else if (isNarrow.matches) {
      show(false);
    } else {
      return;
    }
    event.stopPropagation();
  });
  isNarrow.addEventListener('change', () => show(!isNarrow.matches, { focus: false }));
  // Changes in other tabs.
  addEventListener('storage', (event) => {
    if (event.key && !event.key.startsWith(KEY_PREFIX)) return;
    const shown = current();
    loadConversations();
    // This tab keeps the state of the conversation that it shows.
    if (conversations.has(shown.id)) conversations.set(shown.id, shown);
    expanded = renamed = null;
    render();
  });
  show(!isNarrow.matches, { focus: false });
  return { render };
}
