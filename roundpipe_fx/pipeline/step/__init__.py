"""Steps: what runs microbatches, in this process or with others, and hands their results on."""
