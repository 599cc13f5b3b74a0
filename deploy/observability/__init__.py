"""What watches a stack from outside: Prometheus' configuration and alert rules, Grafana's dashboards."""
