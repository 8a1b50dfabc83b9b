"""The workers of one node: started through the zygote, watched, heard, buried."""
