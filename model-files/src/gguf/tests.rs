//! Tests of the GGUF reader.
