"""`hpcrl bench`: what this machine allows, what is reached, and where the rest goes."""
