"""The client of a server: requests of the OpenAI API over HTTP, streams and their times, the server's processes."""
