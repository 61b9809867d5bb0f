"""Dashboard pages, mounted on the same app as the API."""
