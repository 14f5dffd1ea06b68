"""Paged KV. Read: block_pool (who owns which block), prefix_index (which block holds which tokens), block_table
(the batch's copy of it), storage and device_storage (the bytes, on a host and on a GPU)."""
