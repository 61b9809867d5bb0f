"""Reading CSV and writing prepared folders that can be resumed."""
