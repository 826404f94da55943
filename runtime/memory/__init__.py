"""Who owns which KV slot: the page pool and the radix tree."""
