//! Models from a hub.
