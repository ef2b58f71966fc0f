// swift-tools-version: 6.2
import PackageDescription

let package = Package(
    name: "ask",
    platforms: [.macOS("27.0"), .iOS("27.0")],
    dependencies: [
        // A commit: version 0.2.0 depends on a branch, which SwiftPM allows for commits only.
        .package(
            url: "https://github.com/apple/coreai-models", revision: "86b363dca67cf276c1a5c96eea5e4b57e3a0643c"),
        .package(url: "https://github.com/huggingface/swift-transformers", from: "1.1.0"),
    ],
    targets: [
        .target(
            name: "AFMBundle",
            dependencies: [
                .product(name: "CoreAILM", package: "coreai-models"),
                .product(name: "Transformers", package: "swift-transformers"),
            ]),
        .executableTarget(name: "ask", dependencies: ["AFMBundle"]),
        .testTarget(name: "AFMBundleTests", dependencies: ["AFMBundle"]),
    ]
)
