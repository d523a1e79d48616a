"""Chat: requests to prompts, generated text to reasoning, content and tool calls."""
