"""Paths of the HTTP API."""

PAGE, HEALTH, METRICS, MODELS = '/', '/health', '/metrics', '/v1/models'
COMPLETIONS, CHAT, EMBEDDINGS = '/v1/completions', '/v1/chat/completions', '/v1/embeddings'
TOKENIZE, DETOKENIZE, TOKENIZER_INFO = '/tokenize', '/detokenize', '/tokenizer_info'
OPENAPI, DOCS = '/openapi.json', '/docs'
TOKEN_PATHS = (TOKENIZE, DETOKENIZE, TOKENIZER_INFO)
PATHS = (PAGE, HEALTH, METRICS, MODELS, COMPLETIONS, CHAT, EMBEDDINGS, *TOKEN_PATHS, OPENAPI, DOCS)
COMPLETION_PATHS = (COMPLETIONS, CHAT)
# Requests that a shutdown waits for.
POST_PATHS = (*COMPLETION_PATHS, EMBEDDINGS, TOKENIZE, DETOKENIZE)
# Paths that need no key. The chat page asks the user for the key.
PUBLIC_PATHS = (PAGE, HEALTH, OPENAPI, DOCS)
