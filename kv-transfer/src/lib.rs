//! kv-transfer
