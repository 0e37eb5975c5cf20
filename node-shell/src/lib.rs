//! node-shell
