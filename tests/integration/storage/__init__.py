"""Object stores, and data prepared from and to them."""
