//! Every numbered example runs, and its own assertions hold.

macro_rules! example {
    ($name:ident, $file:literal) => {
        #[path = $file]
        #[allow(missing_docs)]
        mod $name;

        #[test]
        fn $name() {
            $name::main().unwrap();
        }
    };
}

example!(hello_graph, "../../../examples/1_hello_graph.rs");
example!(two_devices, "../../../examples/2_two_devices.rs");
example!(sticky_and_meta, "../../../examples/3_sticky_and_meta.rs");
example!(variable_length, "../../../examples/4_variable_length.rs");
example!(priorities, "../../../examples/5_priorities.rs");
example!(graph_file, "../../../examples/6_graph_file.rs");
example!(transfer, "../../../examples/7_transfer.rs");
example!(resident, "../../../examples/8_resident.rs");
example!(resident_bfs, "../../../examples/9_resident_bfs.rs");
example!(device_heap, "../../../examples/10_device_heap.rs");
example!(placement, "../../../examples/11_placement.rs");
