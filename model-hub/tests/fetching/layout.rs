//! What is fetched, where it goes, and when the hub is asked at all.

use std::fs;

use anyhow::Result;
use model_hub::Need;
use serde_json::json;

use crate::standin::{Fault, checksum};
use crate::{REPOSITORY, Scene, TOKEN, publish, weights};

#[tokio::test]
async fn only_what_is_needed_is_fetched_into_the_layout_of_the_hubs_tools() -> Result<()> {
    let scene = Scene::new().await?.with_token(TOKEN);
    let (hub, large) = (&scene.hub, weights(200_000));
    hub.require(TOKEN);
    let files: [(&str, &[u8]); 6] = [
        ("README.md", b"#"),
        ("config.json", b"{}"),
        ("tokenizer.json", b"[]"),
        ("model.safetensors", &large),
        ("pytorch_model.bin", &large[1..]),
        ("original/consolidated.00.pth", &large[2..]),
    ];
    let commit = hub.publish(REPOSITORY, 'a', &files);
    for wrong in ["../../evil", "/evil", "tokenizer/../../evil"] {
        hub.list_also(json!({ "rfilename": wrong, "size": 2, "blobId": checksum(b"[]") }));
    }

    let text = scene.fetch_as("hf://tiny/model", Need::Text).await?;
    assert_eq!(text.path, scene.root().join("snapshots").join(&commit));
    assert!(hub.seen_of("safetensors").is_empty(), "nobody needs weights for text");
    let fetched = scene.fetch("hf://tiny/model").await?;
    assert_eq!((&fetched.path, &fetched.commit), (&text.path, &commit));

    let mut names: Vec<_> = fs::read_dir(&fetched.path)?
        .map(|e| Ok(e?.file_name()))
        .collect::<Result<_>>()?;
    names.sort();
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(fs::read(fetched.path.join("model.safetensors"))?, large);
    let link = fs::read_link(fetched.path.join("model.safetensors"))?;
    assert_eq!(link.display().to_string(), format!("../../blobs/{}", checksum(&large)));
    assert_eq!(fs::read_to_string(scene.root().join("refs/main"))?, commit);
    assert!(!scene.unfinished(&large).exists());
    for evil in ["evil", "../evil"] {
        assert!(!scene.root().join(evil).exists() && !scene.cache.path().join(evil).exists());
    }
    // The token goes to the hub, and only there.
    let own = Some(format!("Bearer {TOKEN}"));
    for seen in hub.seen() {
        assert_eq!(
            seen.authorization,
            if seen.cdn { None } else { own.clone() },
            "{seen:?}"
        );
    }
    assert_eq!(hub.seen().iter().filter(|seen| seen.cdn).count(), 1);
    assert_eq!(
        hub.seen_of("/resolve-cache/").len(),
        1,
        "a redirect within the hub is followed with the token"
    );
    assert!(hub.seen_of("pytorch").is_empty() && hub.seen_of("original").is_empty());
    Ok(())
}

#[tokio::test]
async fn what_is_here_is_used_without_asking_for_it_again() -> Result<()> {
    let mut scene = Scene::new().await?;
    let large = weights(200_000);
    let commit = publish(&scene.hub, &large);
    let first = scene.fetch("hf://tiny/model").await?;
    scene.hub.forget();
    assert_eq!(scene.fetch("hf://tiny/model").await?, first);
    let asked: Vec<String> = scene.hub.seen().into_iter().map(|seen| seen.path).collect();
    assert_eq!(
        asked,
        ["/api/models/tiny/model/revision/main?blobs=true"],
        "only what the branch is now"
    );

    // Of a commit it is known for ever.
    scene.hub.forget();
    assert_eq!(scene.fetch(&format!("hf://tiny/model@{commit}")).await?, first);
    assert!(scene.hub.seen().is_empty());

    // Another commit shares what is equal.
    let other = scene.hub.publish(
        REPOSITORY,
        'b',
        &[
            ("config.json", b"{ }"),
            ("tokenizer.json", b"{\"model\": {}}"),
            ("model.safetensors", &large),
        ],
    );
    let moved = scene.fetch("hf://tiny/model@main").await?;
    assert_eq!(moved.commit, other);
    assert_eq!(scene.hub.seen_of("/resolve/").len(), 1, "{:?}", scene.hub.seen());
    assert_eq!(fs::read(moved.path.join("model.safetensors"))?, large);

    // An outage is no reason to serve nothing, if it is here.
    scene.model.hub_tries = 1;
    let failing = |status| Fault::Status(status, Vec::new());
    scene.hub.fault("/revision/", failing(503));
    assert_eq!(scene.fetch("hf://tiny/model").await?, moved);
    scene.hub.fault("/revision/", failing(503));
    assert!(scene.error("hf://tiny/other").await.contains("status 503"));

    scene.hub.forget();
    scene.model.offline = true;
    assert_eq!(scene.fetch("hf://tiny/model").await?, moved);
    assert_eq!(scene.fetch(&format!("hf://tiny/model@{commit}")).await?, first);
    assert!(
        scene
            .error("hf://tiny/model@v2")
            .await
            .contains("it lacks the commit of \"v2\", and model.offline is set")
    );
    fs::remove_file(scene.root().join("blobs").join(checksum(&large)))?;
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .contains("it lacks model.safetensors")
    );
    assert!(scene.hub.seen().is_empty(), "offline means that nobody is asked");
    Ok(())
}

#[tokio::test]
async fn a_cache_that_other_tools_have_filled_serves_offline() -> Result<()> {
    let mut scene = Scene::new().await?;
    scene.model.offline = true;
    let commit = "c".repeat(40);
    let folder = scene.root().join("snapshots").join(&commit);
    fs::create_dir_all(&folder)?;
    fs::create_dir_all(scene.root().join("refs"))?;
    fs::write(scene.root().join("refs/main"), &commit)?;
    for file in ["config.json", "tokenizer.json", "m-1.safetensors"] {
        fs::write(folder.join(file), "{}")?;
    }
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .contains("it lacks model.safetensors")
    );
    let index = json!({ "weight_map": { "a": "m-1.safetensors", "b": "m-2.safetensors" } });
    fs::write(folder.join("model.safetensors.index.json"), index.to_string())?;
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .contains("it lacks m-2.safetensors")
    );
    fs::write(folder.join("m-2.safetensors"), "{}")?;
    assert_eq!(scene.fetch("hf://tiny/model").await?.path, folder);
    Ok(())
}

#[tokio::test]
async fn weights_in_parts_and_gguf_files_are_fetched_by_name() -> Result<()> {
    let scene = Scene::new().await?;
    let large = weights(100_000);
    let index = json!({ "weight_map": { "a": "m-1.safetensors", "b": "m-2.safetensors" } }).to_string();
    let commit = scene.hub.publish(
        REPOSITORY,
        'a',
        &[
            ("config.json", b"{}"),
            ("generation_config.json", b"{}"),
            ("model.safetensors.index.json", index.as_bytes()),
            ("m-1.safetensors", &large),
            ("m-2.safetensors", &large[1..]),
            ("m-3.safetensors", &large[2..]),
            ("q4/x-00001-of-00002.gguf", &large[3..]),
            ("q4/x-00002-of-00002.gguf", b"second"),
        ],
    );
    scene.hub.point(REPOSITORY, "refs/pr/1", &commit);
    let directory = scene.fetch("hf://tiny/model@refs/pr/1").await?;
    assert_eq!(fs::read(directory.path.join("m-2.safetensors"))?, &large[1..]);
    assert!(!directory.path.join("m-3.safetensors").exists(), "not in the index");
    assert_eq!(fs::read(directory.path.join("generation_config.json"))?, b"{}");
    assert_eq!(
        scene.hub.seen_of("config.json").len(),
        1,
        "equal files are fetched once"
    );
    assert_eq!(fs::read_to_string(scene.root().join("refs/refs/pr/1"))?, commit);

    let gguf = scene.fetch("hf://tiny/model/q4/x-00001-of-00002.gguf").await?;
    assert_eq!(gguf.path, directory.path.join("q4/x-00001-of-00002.gguf"));
    assert_eq!(fs::read(&gguf.path)?, &large[3..]);
    assert_eq!(
        fs::read(directory.path.join("q4/x-00002-of-00002.gguf"))?,
        b"second",
        "all parts come along"
    );
    Ok(())
}

#[tokio::test]
async fn a_list_without_checksums_is_completed_by_asking_for_each_file() -> Result<()> {
    let scene = Scene::new().await?;
    let large = weights(100_000);
    scene.hub.list_plainly();
    publish(&scene.hub, &large);
    let fetched = scene.fetch("hf://tiny/model").await?;
    assert_eq!(fs::read(fetched.path.join("model.safetensors"))?, large);
    let heads = scene.hub.seen().into_iter().filter(|seen| seen.method == "HEAD");
    assert!(heads.clone().all(|seen| !seen.cdn), "the hub itself knows the checksum");
    assert_eq!(heads.count(), 4, "one of them is led on");
    // Without a checksum nothing is fetched.
    let unnamed = Fault::Status(200, vec![("etag", "\"12-34\"".to_owned())]);
    scene.hub.publish(
        REPOSITORY,
        'b',
        &[("config.json", b"{  }"), ("model.safetensors", &large)],
    );
    scene.hub.fault("/config.json", unnamed);
    assert!(
        scene
            .error("hf://tiny/model")
            .await
            .contains("config.json with no size and checksum")
    );
    Ok(())
}
