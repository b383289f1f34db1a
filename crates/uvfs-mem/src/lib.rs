//! Arenas, LRU lists, memory pressure and shrinkers.
