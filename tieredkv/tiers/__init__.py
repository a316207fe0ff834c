"""Where blocks live: hot memory, cold LMDB, and the writer between them."""
