"""HTTP server: one engine thread that owns the context, and an asyncio front with several APIs."""
