"""What a sender gives: bodies and headers as they are stored, and connections under asyncio."""
