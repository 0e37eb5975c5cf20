//! Tests of the whole engine with the scripted runner.
