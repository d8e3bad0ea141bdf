"""Device mesh, logical axis rules and host offloading."""
