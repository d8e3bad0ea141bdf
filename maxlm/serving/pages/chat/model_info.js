// The dialog with information about the model.

// Fills the dialog with the properties of a model.
function showInfo(model) {
  const names = { float: 'Not quantized', model: 'Compute dtype' };
  const count = (number) => number.toLocaleString('en');
  const rows = {
    Name: model.id,
    Step: count(model.step),
    Parameters: count(model.num_parameters),
    'Context length': `${count(model.max_model_len)} tokens`,
    'Max tokens of a response': model.max_tokens ? count(model.max_tokens) : 'Rest of the context',
    Vocabulary: `${count(model.vocab_size)} tokens`,
    'Compute dtype': model.dtype,
    Weights: names[model.weight_quantization] ?? model.weight_quantization,
    'Key-value cache': names[model.kv_cache_dtype] ?? model.kv_cache_dtype,
    'Chat template': model.chat ? 'Yes' : 'No',
    ...(model.chat && { 'Full context': 'The oldest messages are dropped' }),
    API: `${location.origin}/v1`,
  };
  const entries = Object.entries(rows).flatMap(([name, value]) => [element('dt', '', name), element('dd', '', value)]);
  document.getElementById('info-list').replaceChildren(...entries);
}

{
  const info = document.getElementById('info');
  document.getElementById('open-info').addEventListener('click', () => info.showModal());
  info.addEventListener('click', (event) => { if (event.target === info) info.close(); });
}
