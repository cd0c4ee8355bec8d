"""Plain oracles, one a policy: unbatched, from the papers' equations, sharing no code with the library."""
