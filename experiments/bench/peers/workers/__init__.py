"""One module for each environment: what a peer, or jaxttp, does for a row."""
