"""The paged KV cache: pages shared by sequences, and the steps that write into them."""
