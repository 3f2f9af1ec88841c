"""Load on servers that speak OpenAI's protocol: clients and arrivals, latencies, throughput, goodput."""
