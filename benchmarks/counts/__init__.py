"""What the guard holds without a GPU: operations, bytes, launches, waits, compiled code, imports, memory."""
