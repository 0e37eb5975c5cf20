//! prefill-node
