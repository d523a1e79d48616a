"""HTTP server: one engine thread that owns the context, an asyncio front with the llama.cpp, OpenAI and Anthropic APIs."""
