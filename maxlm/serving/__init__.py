"""A trained model behind HTTP: requests as OpenAI's, answers as they are drawn, a page to talk to it."""
