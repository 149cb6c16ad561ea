gradient_checkpoint_scope = None
