//! decode-node
