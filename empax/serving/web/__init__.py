"""A server for a run or a model: OpenAI's endpoints and a page to talk to (the extra `serve`)."""
