"""One op per file: its kernels, its operators, its public function and its record for
the registry.
"""
