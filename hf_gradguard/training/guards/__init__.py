"""Guards that refuse labels before a training, and hooks that would not run as in a plain one."""
