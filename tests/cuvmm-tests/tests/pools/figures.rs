//! Statistics, call counts and shortages as text for people and as data for programs.

use crate::common::{G, pool};
use crate::on_both;
use cuvmm::BlockError;
use serde_json::json;

on_both! {
    fn a_pool_shows_its_tenants(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("chat").guarantee(4 * G).register().unwrap();
        let _block = tenant.try_allocate(3 * G).unwrap();
        let stats = pool.stats();
        let text = stats.to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "6 MiB committed (0 B stranded) of 32 MiB, at most 6 MiB so far");
        assert!(lines[2].starts_with("tenant  in use  padding"), "{text}");
        let cells: Vec<&str> = lines[3].split_whitespace().collect();
        assert_eq!(cells[..3], ["chat", "6", "MiB"], "{text}");
        assert_eq!(lines.len(), 5, "{text}");

        // A tenant by itself has the same form, and its row is the pool's.
        tenant.try_allocate(20 * G).unwrap_err();
        let (own, all) = (tenant.stats(), pool.stats().to_string());
        let alone = own.to_string();
        let shown: Vec<&str> = alone.lines().collect();
        assert_eq!((shown[0], shown[1]), (lines[0], "0 B exported, 0 B asleep"));
        assert_eq!(shown[2..4], lines[2..4]);
        let (mappings, addresses) = (own.mappings, own.addresses >> 20);
        let plural = if mappings == 1 { "" } else { "s" };
        assert_eq!(
            shown[4..],
            [format!("{mappings} mapping{plural}, {addresses} MiB of addresses, 1 block, 0 leases, 1 refusal")]
        );
        assert!(all.contains(" of addresses, 1 refusal, "), "{all}");

        let data = serde_json::to_value(&stats).unwrap();
        assert_eq!((&data["limit"], &data["committed"]), (&json!(16 * G), &json!(3 * G)));
        assert_eq!(data["tenants"][0]["name"], "chat");
        assert_eq!(data["tenants"][0]["guarantee"], 4 * G);
        let made = stats.calls.count(cuvmm::driver::Call::MemCreate);
        assert_eq!(data["calls"]["cuMemCreate"]["count"], made);
        assert!(stats.calls.to_string().contains("cuMemCreate"));
    }

    fn a_pool_shows_stranded_and_shared_memory(rig) {
        let pool = pool(rig, 16);
        let tenant = pool.tenant("chat").register().unwrap();
        let mut block = tenant.try_allocate(8 * G).unwrap();
        let shown = |row: usize| pool.stats().to_string().lines().nth(row).unwrap().to_owned();
        // One extent: what the block gives up is stranded in it.
        block.shrink_to(3 * G).unwrap();
        assert_eq!(shown(0), "16 MiB committed (10 MiB stranded) of 32 MiB, at most 16 MiB so far");
        block.grow_to(8 * G).unwrap();
        let fork = block.fork(8 * G, 8 * G).unwrap();
        let stats = &pool.stats().tenants[0];
        assert_eq!((stats.in_use, stats.shared), (0, 8 * G));
        assert!(shown(3).starts_with("chat    16 MiB"), "{}", shown(3));
        drop((block, fork));
    }

    fn a_shortage_is_one_line_in_an_error_and_a_table_alone(rig) {
        let pool = pool(rig, 4);
        let (one, two) = (pool.tenant("one").register().unwrap(), pool.tenant("two").register().unwrap());
        let _held = two.try_allocate(3 * G).unwrap();
        let refused = one.try_allocate(2 * G).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "out of memory: tenant \"one\" needs 4 MiB more, 2 MiB available (limit 8 MiB, tenant \
             holds 0 B of at most 8 MiB, 6 MiB held by \"two\")"
        );
        let BlockError::OutOfMemory(shortage) = refused else {
            panic!("{refused}");
        };
        assert!(shortage.to_string().lines().any(|line| line == "held by \"two\"        6 MiB"), "{shortage}");
        let data = serde_json::to_value(&*shortage).unwrap();
        assert_eq!((&data["wanted"], &data["available"]), (&json!(2 * G), &json!(G)));
        assert_eq!(data["holders"], json!([["two", 3 * G]]));
    }
}
