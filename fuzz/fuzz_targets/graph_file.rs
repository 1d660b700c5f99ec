//! Any text is a graph that can be checked and drawn, or a clean error.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match forebay::graph::parse(text, &forebay::graph::Library::default()) {
        Ok(graph) => {
            let _ = graph.check();
            let drawing = graph.drawing();
            assert!(drawing.svg(None).ends_with("</svg>\n"));
            assert!(drawing.dot(None).ends_with("}\n"));
        }
        Err(e) => assert!(!e.to_string().is_empty()),
    }
});
