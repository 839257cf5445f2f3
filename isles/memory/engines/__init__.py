"""Who moves bytes and updates parameters beside the computation: `base` says what the executor asks of them."""
