"""`raysim watch`: how runs stand, read from their folders alone, by a process that has nothing else to do with them."""
