//! model-files
