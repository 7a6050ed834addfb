"""Web pages for operators, rendered on the server; every page has its JSON twin."""
