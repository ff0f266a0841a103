"""Who asks: keys, tenants, and what each may take. Knows no prompt and no answer."""
