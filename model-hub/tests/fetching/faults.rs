//! What goes wrong: what may pass passes, all else is one clear line.

use std::fs;

use anyhow::Result;
use serde_json::json;

use crate::standin::{Fault, checksum};
use crate::{REPOSITORY, Scene, TOKEN, publish, weights};

fn status(status: u16, headers: &[(&'static str, &str)]) -> Fault {
    Fault::Status(
        status,
        headers
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect(),
    )
}

#[tokio::test]
async fn refusals_say_what_can_be_done() -> Result<()> {
    let scene = Scene::new().await?;
    publish(&scene.hub, b"w");
    scene.hub.publish("tiny/gguf", 'b', &[("x.gguf", b"x")]);
    for (reference, expected) in [
        (
            "hf://tiny/none",
            "has no repository tiny/none that can be read without a token",
        ),
        ("hf://tiny/model@v9", "tiny/model has no revision \"v9\""),
        (
            "hf://tiny/gguf",
            "one of its GGUF files would be right, for example hf://tiny/gguf/x.gguf",
        ),
        (
            "hf://tiny/gguf/y.gguf",
            "tiny/gguf has no file y.gguf in main; there are x.gguf",
        ),
    ] {
        let error = scene.error(reference).await;
        assert!(error.contains(expected), "{error}");
    }
    scene
        .hub
        .fault("/config.json", status(404, &[("x-error-code", "EntryNotFound")]));
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .contains("has no file config.json in main")
    );
    scene
        .hub
        .fault("/revision/", status(403, &[("x-error-code", "GatedRepo")]));
    let gated = scene.error("hf://tiny/model").await;
    assert!(
        gated.contains("given access") && gated.contains("set model.hub_token_file or HF_TOKEN"),
        "{gated}"
    );
    scene
        .hub
        .fault("/revision/", status(418, &[("x-error-message", "short and stout")]));
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .contains("status 418: short and stout")
    );
    scene.hub.fault("/revision/", status(200, &[]));
    assert!(scene.error("hf://tiny/model").await.contains("no list of files"));
    Ok(())
}

#[tokio::test]
async fn refused_tokens_are_told_from_missing_ones() -> Result<()> {
    let scene = Scene::new().await?;
    publish(&scene.hub, b"w");
    scene.hub.require(TOKEN);
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .contains("that can be read without a token")
    );
    let scene = scene.with_token("hf_another_token");
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .contains("does not accept the one that is set")
    );
    let scene = scene.with_token(TOKEN);
    scene.fetch("hf://tiny/model").await?;
    scene.hub.fault("/revision/", status(403, &[]));
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .contains("use the token of an account that has it")
    );
    Ok(())
}

#[tokio::test]
async fn what_passes_is_waited_for() -> Result<()> {
    let scene = Scene::new().await?;
    let large = weights(3 << 20);
    publish(&scene.hub, &large);
    scene.hub.fault("/revision/", status(503, &[("retry-after", "0")]));
    scene.hub.fault("/revision/", status(429, &[("retry-after", "0")]));
    scene.hub.fault("/config.json", status(500, &[]));
    // An expired link; then cuts, of which those that got far enough do not count as failures in a row.
    scene.hub.fault("/cdn/", status(403, &[("retry-after", "0")]));
    scene.hub.fault("/cdn/", Fault::Cut(100_000));
    scene.hub.fault("/cdn/", Fault::Cut(1_500_000));
    let fetched = scene.fetch("hf://tiny/model").await?;
    assert_eq!(fs::read(fetched.path.join("model.safetensors"))?, large);
    let sent: Vec<_> = scene
        .hub
        .seen_of("/cdn/")
        .iter()
        .map(|seen| (seen.from, seen.sent))
        .collect();
    let rest = large.len() - 1_600_000;
    assert_eq!(
        sent,
        [
            (None, 0),
            (None, 100_000),
            (Some(100_000), 1_500_000),
            (Some(1_600_000), rest)
        ],
        "every byte is sent once"
    );

    let patient = status(429, &[("retry-after", "3600")]);
    scene.hub.fault("/revision/", patient);
    assert!(
        scene.error("hf://tiny/model@v9").await.contains("status 429"),
        "nobody waits for an hour"
    );
    Ok(())
}

#[tokio::test]
async fn servers_that_do_not_know_ranges_or_fall_silent_are_coped_with() -> Result<()> {
    let mut scene = Scene::new().await?;
    let large = weights(600_000);
    publish(&scene.hub, &large);
    scene.model.hub_timeout_ms = 2_000;
    scene.hub.fault("/cdn/", Fault::Pause(300_000));
    scene.hub.fault("/cdn/", Fault::IgnoreRange);
    let fetched = scene.fetch("hf://tiny/model").await?;
    assert_eq!(fs::read(fetched.path.join("model.safetensors"))?, large);
    let sent: Vec<_> = scene
        .hub
        .seen_of("/cdn/")
        .iter()
        .map(|seen| (seen.from, seen.sent))
        .collect();
    assert_eq!(sent, [(None, 300_000), (Some(300_000), 600_000)]);
    Ok(())
}

#[tokio::test]
async fn wrong_bytes_never_get_a_name() -> Result<()> {
    let mut scene = Scene::new().await?;
    scene.model.hub_tries = 1;
    let large = weights(600_000);
    publish(&scene.hub, &large);
    let blob = scene.root().join("blobs").join(checksum(&large));

    scene.hub.fault("/cdn/", Fault::Spoil);
    let error = scene.error("hf://tiny/model").await;
    assert!(
        error.contains("model.safetensors has the checksum") && error.contains("has been deleted"),
        "{error}"
    );
    assert!(!blob.exists() && !scene.unfinished(&large).exists());

    scene.hub.fault("/cdn/", Fault::Announce(599_999));
    let error = scene.error("hf://tiny/model").await;
    assert!(
        error.contains("599999 bytes are announced where 600000 are missing"),
        "{error}"
    );
    scene.hub.fault("/cdn/", Fault::Longer);
    let error = scene.error("hf://tiny/model").await;
    assert!(error.contains("more than the 600000 bytes of the list came"), "{error}");
    scene.hub.fault("/cdn/", Fault::Cut(70_000));
    let error = scene.error("hf://tiny/model").await;
    assert!(
        error.contains("model.safetensors from") && error.contains("(failed tries in a row: 1)"),
        "{error}"
    );
    assert_eq!(
        fs::metadata(scene.unfinished(&large))?.len(),
        70_000,
        "what came is kept"
    );
    assert!(!blob.exists());

    // What is left of an earlier fetch is damaged, or too long.
    for left in [vec![7; 1_000], vec![7; 600_000], vec![7; 700_000]] {
        scene.hub.forget();
        fs::write(scene.unfinished(&large), &left)?;
        scene.fetch("hf://tiny/model").await?;
        assert_eq!(fs::read(&blob)?, large);
        let sent: Vec<_> = scene.hub.seen_of("/cdn/").iter().map(|seen| seen.from).collect();
        let expected = if left.len() == 1_000 {
            vec![Some(1_000), None]
        } else {
            vec![None]
        };
        assert_eq!(sent, expected);
        fs::remove_file(&blob)?;
    }
    // A file that is here, but was cut, is fetched again.
    fs::write(&blob, &large[..5])?;
    scene.fetch("hf://tiny/model").await?;
    assert_eq!(fs::read(&blob)?, large);
    Ok(())
}

#[tokio::test]
async fn indices_and_disks_are_checked_before_weights_are_fetched() -> Result<()> {
    let mut scene = Scene::new().await?;
    let index = json!({ "weight_map": { "a": "../../model.safetensors" } }).to_string();
    let files: [(&str, &[u8]); 2] = [
        ("config.json", b"{}"),
        ("model.safetensors.index.json", index.as_bytes()),
    ];
    scene.hub.publish(REPOSITORY, 'a', &files);
    assert!(scene.error("hf://tiny/model").await.contains("no plain file name"));

    scene.hub.publish(REPOSITORY, 'b', &[("config.json", b"{}")]);
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .contains("has neither model.safetensors nor")
    );
    let huge = json!({ "rfilename": "model.safetensors", "lfs": { "sha256": "e".repeat(64), "size": 1_u64 << 60 } });
    scene.hub.list_also(huge);
    let error = scene.error("hf://tiny/model").await;
    assert!(
        error.contains(&format!("{} more bytes are needed", 1_u64 << 60)) && error.contains("are free"),
        "{error}"
    );
    assert!(
        scene
            .hub
            .seen_of("model.safetensors")
            .iter()
            .all(|seen| seen.path.contains("index"))
    );

    let file = scene.cache.path().join("file");
    fs::write(&file, "")?;
    scene.model.hub_cache_dir = file.join("cache").display().to_string();
    let error = scene.error("hf://tiny/model").await;
    assert!(
        error.contains("file/cache/models--tiny--model/blobs: Not a directory"),
        "{error}"
    );
    scene.model.hub_cache_dir = String::new();
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .starts_with("model.hub_cache_dir: is empty")
    );
    Ok(())
}
